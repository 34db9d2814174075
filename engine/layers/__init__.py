"""Layers of models. Shapes in docstrings are written with these letters.

    T   tokens of a step, of all its requests        H   hidden size; of latent attention: heads
    R   requests of a step                           I   intermediate size of a feed-forward block
    S   rows whose logits are computed               E   experts;  k: of them for a token
    Hq, Hkv   query and key/value heads of a rank    N, K   outputs and inputs of a matrix
    D, V      width of a head's keys, its values     G   groups of inputs that share a scale
    L, R      latent of MLA, its rotated part        N, B   blocks of the cache, tokens of a block

Tensors are in the model's dtype (`ModelConfig.dtype`) unless a docstring says otherwise.
"""
