"""The program behind ``python -m medclip_dcl``: commands, checks of configurations, output."""
