"""One wrapped model: arguments, compilation, calls, weights kept in step."""
