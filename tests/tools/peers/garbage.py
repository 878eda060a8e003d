"""Starts well and then answers what is no JSON."""
import json
import sys

print(json.dumps({"version": "9", "about": "garbage"}), flush=True)
for _ in sys.stdin:
    print("{ this is no JSON", flush=True)
