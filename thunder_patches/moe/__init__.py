"""Mixture-of-experts layers: gate and up projections fused, experts streamed from disk.

    layers.py     finds a model's SwitchGLU layers and tells how each one stands
    halves.py     a gate and an up projection that run as one gather matmul
    fusion.py     fuses a loaded model layer by layer, checks it on this device, undoes it
    families.py   the model families for which fusion is proven

Nothing here imports a host: its classes come from `sys.modules`, where the host has put them.
"""
