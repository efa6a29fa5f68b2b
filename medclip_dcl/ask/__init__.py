"""Ask a trained model about image files from the shell: ``python -m medclip_dcl.ask``."""
