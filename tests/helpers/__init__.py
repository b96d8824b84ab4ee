"""What tests share: models, ways to run them, plain references to compare with."""
