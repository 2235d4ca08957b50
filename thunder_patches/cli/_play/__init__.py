"""What ``thunder demo``, ``thunder bench`` and the benchmarks of the tests share.

A small real model (:mod:`.model`), server processes with the package on and off (:mod:`.server`),
an HTTP client that times answers (:mod:`.client`), texts and the requests made of them
(:mod:`.texts`, :mod:`.talk`), the comparison of two runs (:mod:`.compare`), and figures
(:mod:`.figures`). Nothing here is imported while a model is served.
"""
