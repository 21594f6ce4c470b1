"""Command line programs, each run as `python -m modeling_elmo.run_scripts.NAME`."""
