"""Commands that prepare data: each stage is `python -m data_prep.NAME`."""
