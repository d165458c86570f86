"""Values worked by hand for the quantisation papers: facts, each named after the section of the algorithms notes.

Section 8 is KIVI, 9 KVQuant, 10 ZipCache, 15 OScaR. Numbers are rounded to four digits unless said otherwise.
"""

# Section 8, KIVI at 2 bits. Keys: two channels over a group of 16 tokens.
KIVI_KEYS = [[float(at), 30.0 if at == 5 else -30.0 if at == 9 else 0.0] for at in range(16)]
KIVI_KEY_STEPS = [5.0, 20.0]
KIVI_KEY_LOWS = [0.0, -30.0]
KIVI_KEY_CODES = [[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3], [2, 2, 2, 2, 2, 3, 2, 2, 2, 0, 2, 2, 2, 2, 2, 2]]
KIVI_KEY_WORDS = [[-22391488], [-1432179030]]
KIVI_KEYS_RESTORED = [
    [0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 5.0, 5.0, 10.0, 10.0, 10.0, 10.0, 10.0, 15.0, 15.0, 15.0],
    [10.0, 10.0, 10.0, 10.0, 10.0, 30.0, 10.0, 10.0, 10.0, -30.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0],
]
# Values: two tokens of 16 channels in groups of 8; the first group of the second is constant, which has no codes.
KIVI_VALUES = [
    [at / 7 for at in range(8)] + [6 * at / 7 - 3 for at in range(8)],
    [0.5] * 8 + [2.0 * at - 7 for at in range(8)],
]
KIVI_VALUE_GROUPS = [(0, 0, 0.3333, 0.0), (0, 1, 2.0, -3.0), (1, 1, 4.6667, -7.0)]  # token, group, step, low
KIVI_VALUE_CODES = [0, 0, 1, 1, 2, 2, 3, 3]  # of each of these groups
# Bookkeeping with a residual of 4: a prompt of 10, then four tokens. Codes and residual of keys, then of values.
KIVI_TOKENS = [(8, 2, 6, 4), (8, 3, 7, 4), (12, 0, 8, 4), (12, 1, 9, 4), (12, 2, 10, 4)]
# Bytes per token and layer of eight KV heads of 128 channels: bits, group, bytes; 4096 at 16 bits.
KIVI_BYTES = [(2, 32, 768), (4, 32, 1280), (2, 64, 640), (4, 64, 1152), (2, 128, 576), (4, 128, 1088)]

# Section 9, KVQuant. Three clusters: weights, means, cost.
KVQUANT_NUMBERS = [-1.0, -0.6, -0.5, 0.2, 0.3, 0.9]
KVQUANT_CLUSTERS = [
    ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [-0.7, 0.25, 0.9], 0.145),
    ([1.0, 1.0, 8.0, 1.0, 1.0, 1.0], [-0.56, 0.25, 0.9], 0.229),
]
KVQUANT_LEVELS = [-0.9, -0.1, 0.3, 1.0]
# Keys by channel: numbers over four tokens, range, outliers, codes, restored.
KVQUANT_KEYS = [
    ([0.0, 2.0, 4.0, 40.0], (0.0, 4.0), [False, False, False, True], [0, 1, 3, 1], [0.2, 1.8, 4.0, 40.0]),
    ([1.0, 9.0, -1.0, 0.0], (-2.0, 2.0), [False, True, False, False], [2, 1, 0, 1], [0.6, 9.0, -1.8, -0.2]),
]
# Values of one token, of which a quarter are outliers.
KVQUANT_VALUE = [0.1, 0.4, -0.3, 8.0, 0.2, -5.0, 0.5, -0.15]
KVQUANT_VALUE_OUTLIERS = [False, False, False, True, False, True, False, False]
KVQUANT_VALUE_RANGE = (-0.3, 0.5)
KVQUANT_VALUE_CODES = [1, 3, 0, 1, 2, 1, 3, 0]
KVQUANT_VALUE_RESTORED = [0.06, 0.5, -0.26, 8.0, 0.22, -5.0, 0.5, -0.26]
# Bits of a number with 1 % outliers, keys and values averaged: bits, channels, bits in all (three digits).
KVQUANT_BITS = [
    (2, 4096, 2.332),
    (2, 1024, 2.367),
    (3, 4096, 3.332),
    (3, 1024, 3.367),
    (4, 4096, 4.332),
    (4, 1024, 4.367),
]

# Section 10, ZipCache: causal attention of six tokens, one head.
ZIPCACHE_ATTENTION = [
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
    [0.4, 0.2, 0.4, 0.0, 0.0, 0.0],
    [0.3, 0.1, 0.1, 0.5, 0.0, 0.0],
    [0.2, 0.1, 0.1, 0.1, 0.5, 0.0],
    [0.1, 0.05, 0.05, 0.1, 0.1, 0.6],
]
ZIPCACHE_ACCUMULATED = [2.5, 0.95, 0.65, 0.7, 0.6, 0.6]
ZIPCACHE_ACCUMULATED_RANKED = [0, 1, 3, 2, 4, 5]
ZIPCACHE_NORMALISED = [0.417, 0.19, 0.162, 0.233, 0.3, 0.6]  # three digits
ZIPCACHE_NORMALISED_RANKED = [5, 0, 4, 3, 1, 2]
ZIPCACHE_PROBES = [3, 5]
ZIPCACHE_PROBED = [0.2, 0.075, 0.075, 0.3, 0.1, 0.6]
ZIPCACHE_PROBED_BY_CODE = [0.0667, 0.03, 0.0375, 0.2, 0.05, 0.6]
ZIPCACHE_OTHERS = [1, 2]  # at 60 % salient tokens, by all queries, and by the probes in the code's form
# Values of three tokens and four channels.
ZIPCACHE_VALUES = [[16.0, 1.0, -0.25, 4.0], [-4.0, 0.25, 0.25, 1.0], [8.0, -0.5, 0.0, -2.0]]
ZIPCACHE_SCALES = [4.0, 1.0, 0.5, 2.0]
ZIPCACHE_DIVIDED = [[4.0, 1.0, -0.5, 2.0], [-1.0, 0.25, 0.5, 0.5], [2.0, -0.5, 0.0, -1.0]]
ZIPCACHE_CODES = {4: [[15, 5, 0, 8], [0, 12, 15, 15], [15, 2, 5, 0]], 2: [[3, 1, 0, 2], [0, 2, 3, 3], [3, 0, 1, 0]]}
ZIPCACHE_RESTORED = {
    4: [[16.0, 1.0, -0.25, 3.8], [-4.0, 0.2, 0.25, 1.0], [8.0, -0.6, 0.0, -2.0]],
    2: [[16.0, 1.0, -0.25, 5.0], [-4.0, 0.0, 0.25, 1.0], [8.0, -1.0, 0.0, -2.0]],
}
# At 2 bits by token without scales of channels (three digits), and mean squared errors with and without them.
ZIPCACHE_UNSCALED = [[16.0, -0.25, -0.25, 5.167], [-4.0, 1.0, 1.0, 1.0], [8.0, -2.0, 1.333, -2.0]]
ZIPCACHE_SQUARED_ERRORS = [0.1094, 0.673]
ZIPCACHE_PACKED = ([3, 1, 0, 2, 2, 0, 1, 3], [99, 201])  # 2-bit codes, bytes
ZIPCACHE_CODE_BITS = [(0.6, 3.2), (0.4, 2.8)]
ZIPCACHE_BYTES = 825.7  # of a token and layer: eight KV heads of 128 channels, 4096 tokens, 60 % salient
ZIPCACHE_TIMES_SMALLER = 4.961  # than 16 bits

# Section 15, OScaR: four keys, of which the first is a tiny sink; relative errors by token at 2 bits (three digits).
OSCAR_KEYS = [[0.1, 0.0, 0.1, 0.0], [8.0, 1.0, -1.0, 2.0], [7.0, -1.0, 2.0, 1.0], [9.0, 2.0, 1.0, -2.0]]
OSCAR_NORMS = [0.1414, 8.3666, 7.4162, 9.4868]
OSCAR_ERRORS = [4.767, 0.12, 0.138, 0.0]
OSCAR_ROTATED_ERRORS = [0.0, 0.032, 0.119, 0.035]
OSCAR_SCALED_ERRORS = [0.0, 0.057, 0.095, 0.027]
