"""Ask a trained model about image files from the shell: ``medclip-dcl ask``."""
