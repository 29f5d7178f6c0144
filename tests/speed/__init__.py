"""Benchmark of a step of Jacobian descent against a step of gradient descent.

Run it with `python -m tests.speed`; `--help` lists the options. It prints a Markdown table.
"""
