"""The program behind ``medclip-dcl``: commands, checks of configurations, output."""
