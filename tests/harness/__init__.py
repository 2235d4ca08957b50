"""Tools for tests against real servers: tiny models, server processes, answers to compare.

models.py   tiny random-weight models with a tokenizer and a chat template
hosts.py    the Python environments to test, each with the wheel installed
server.py   a host's server in a process of its own
client.py   requests and answers, with tokens, logprobs and usage
compare.py  two answers compared, with a readable difference
trace/      a module that only test servers load: counts model calls, injects faults
"""
