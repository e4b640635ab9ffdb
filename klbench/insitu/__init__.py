"""What runs inside sglang's own processes: plugin entry, CPU engine, capture, fault lab.

The server may run under another Python than klbench, so this folder is copied to a folder of its own on the
server's PYTHONPATH and found there as `klbench_insitu` (klbench/engine/pythonpath.py). Hence the rules of
every file here: torch, safetensors and the standard library only, sglang imported lazily, Python 3.10 syntax,
relative imports only. Importing this package or `faults_catalogue` imports nothing else.
"""
