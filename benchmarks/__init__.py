"""Benchmarks: one file a claim. Run alone on the machine: `make bench`, or
`python -m benchmarks NAME`."""
