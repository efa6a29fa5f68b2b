"""Image and text encoders."""
