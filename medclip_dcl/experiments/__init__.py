"""Grids of runs: ``python -m medclip_dcl.experiments FILE.yaml`` runs, continues and reports one."""
