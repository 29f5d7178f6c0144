"""What is released, tried where nothing of the checkout is: ``make release``."""
