"""Mixture-of-experts layers: gate and up projections fused, experts streamed from disk.

    layers.py      finds a model's SwitchGLU layers and says which can be fused
    halves.py      a gate and an up projection that run as one gather matmul
    fusion.py      fuses a model layer by layer, checks it on this device, undoes it
    families.py    the model families for which fusion is proven

    checkpoint.py  where a checkpoint's tensors lie
    reader.py      parallel reads from open files into buffers
    banks.py       the buffers: slots for whole experts, as MLX arrays
    streaming.py   experts on disk: attach, read what is routed to, detach
    residency.py   what is in the page cache
    advice.py      before loading: does it fit, would streaming help

Nothing here imports a host: its classes come from `sys.modules`, where the host has put them.
"""
