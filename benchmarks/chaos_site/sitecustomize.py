"""Every Python of a run with this folder on its PYTHONPATH can be made to fail (`benchmarks/chaos_faults.py`)."""

from benchmarks.chaos_faults import install

install()
