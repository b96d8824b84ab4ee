"""What a plan would cost on IPUs: prices, memory, simulation, estimates and reports of them."""
