"""Values worked by hand for the eviction baselines: facts, each named after the section of the algorithms notes.

Section 2 is StreamingLLM, 3 H2O, 4 SnapKV, 5 AdaKV, 6 CriticalKV, 7 DefensiveKV, 11 TOVA, 12 PyramidKV, 13
counter-causal surprise. Scores are rounded to four digits unless said otherwise.
"""

# Section 0.1, the toy of sections 4 to 7: four query heads, two KV heads, eight tokens, of which the last two are the
# observation window. ATTENTION[query_head][query][key] is that of the window on the six tokens before it; every row
# sums to 0.80. NORMS[kv_head][token] is the group's mean of the L1 norm of the value through W_O, window included.
KV_HEADS = 2
LENGTH = 8
WINDOW = 2
KERNEL = 3
ATTENTION = [
    [[0.30, 0.05, 0.10, 0.20, 0.06, 0.09], [0.20, 0.05, 0.29, 0.11, 0.05, 0.10]],
    [[0.10, 0.38, 0.07, 0.05, 0.11, 0.09], [0.11, 0.20, 0.05, 0.06, 0.18, 0.20]],
    [[0.70, 0.02, 0.03, 0.01, 0.02, 0.02], [0.66, 0.04, 0.02, 0.03, 0.04, 0.01]],
    [[0.20, 0.06, 0.04, 0.40, 0.05, 0.05], [0.26, 0.05, 0.06, 0.34, 0.05, 0.04]],
]
NORMS = [[1.0, 1.0, 1.0, 2.0, 4.0, 1.0, 1.0, 1.0], [0.5, 2.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0]]

# Section 2: 12 tokens, 4 sinks, 4 recent.
STREAMING_KEPT = [0, 1, 2, 3, 8, 9, 10, 11]
STREAMING_ROTATED_AT = [0, 1, 2, 3, 4, 5, 6, 7]
STREAMING_NEXT_QUERY_AT = 8
STREAMING_KEPT_FOR_3 = [0, 1, 2, 3, 11]
STREAMING_KVPRESS_HALF = [0, 1, 2, 3, 10, 11]

# Section 3: two heads, two heavy hitters, two recent; a prompt of five tokens, then token 5 over what is kept.
H2O_PROMPT = [
    [
        [1.0, 0.0, 0.0, 0.0, 0.0],
        [0.6, 0.4, 0.0, 0.0, 0.0],
        [0.2, 0.5, 0.3, 0.0, 0.0],
        [0.1, 0.5, 0.1, 0.3, 0.0],
        [0.1, 0.1, 0.5, 0.1, 0.2],
    ],
    [
        [1.0, 0.0, 0.0, 0.0, 0.0],
        [0.9, 0.1, 0.0, 0.0, 0.0],
        [0.8, 0.1, 0.1, 0.0, 0.0],
        [0.1, 0.1, 0.6, 0.2, 0.0],
        [0.2, 0.1, 0.4, 0.1, 0.2],
    ],
]
H2O_DECODED = [[[0.10, 0.10, 0.50, 0.10, 0.20]], [[0.10, 0.50, 0.10, 0.20, 0.10]]]
H2O_SUMS = [[2.0, 1.5, 0.9, 0.4, 0.2], [3.0, 0.4, 1.1, 0.3, 0.2]]
H2O_KEPT = [[0, 1, 3, 4], [0, 2, 3, 4]]
H2O_SUMS_DECODED = [[2.1, 1.6, 0.9, 0.3, 0.2], [3.1, 1.6, 0.4, 0.4, 0.1]]
H2O_KEPT_DECODED = [[0, 1, 4, 5], [0, 2, 4, 5]]
H2O_KVPRESS_AVERAGES = [[0.4, 0.375, 0.3, 0.2, 0.2], [0.6, 0.1, 0.367, 0.15, 0.2]]  # three digits
H2O_KVPRESS_GROUP_MEAN_KEPT_4 = [0, 1, 2, 4]

# Section 4: four tokens of eight, the window among them.
SNAPKV_AVERAGE = [[0.1158, 0.1583, 0.1342, 0.1108, 0.1083, 0.0733], [0.1658, 0.1783, 0.0917, 0.0908, 0.0883, 0.0233]]
SNAPKV_KVPRESS_KEPT = [[1, 2, 6, 7], [0, 1, 6, 7]]
SNAPKV_MAX_OF_GROUP = [[0.1775, 0.1775, 0.17, 0.1275, 0.12, 0.12], [0.455, 0.455, 0.195, 0.195, 0.195, 0.04]]
SNAPKV_MAX_OF_GROUP_KEPT = [[0, 1, 6, 7], [0, 1, 6, 7]]
SNAPKV_QUERY_HEADS_KEPT = [[1, 3, 6, 7], [1, 2, 6, 7], [0, 1, 6, 7], [2, 3, 6, 7]]
SNAPKV_GROUP_MAX_KEPT = [[1, 2, 6, 7], [0, 1, 6, 7]]

# Section 5, kvpress: tokens kept per head, alpha, floor, kept. The ratios removed are .5, .5 and .375.
ADAKV_FLOORED = [
    (4, 0.2, 0, [[1, 2, 6, 7], [0, 1, 6, 7]]),
    (4, 0.8, 3, [[1, 2, 6, 7], [0, 1, 6, 7]]),
    (5, 0.2, 1, [[0, 1, 2, 3, 6, 7], [0, 1, 6, 7]]),
]
# Section 5, the authors, on SNAPKV_MAX_OF_GROUP: tokens per head, alpha, shares, budgets, kept.
ADAKV_BLENDED = [
    (4, 0.2, [0, 4], [0, 3], [[6, 7], [0, 1, 2, 6, 7]]),
    (4, 0.8, [0, 4], [1, 2], [[0, 6, 7], [0, 1, 6, 7]]),
    (5, 0.2, [1, 5], [1, 4], [[0, 6, 7], [0, 1, 2, 3, 6, 7]]),
]
# Section 5, allocation alone: base 10, shares (17, 3); alpha, budgets.
ADAKV_BLENDS = [(0.0, [17, 3]), (0.2, [16, 4]), (0.5, [14, 6]), (1.0, [10, 10])]

# Section 6, on SNAPKV_AVERAGE: four tokens of eight; alpha a half.
CRITICAL_FIRST = [[1], [1]]
CRITICAL_WEIGHTED = [[0.1158, 0.1583, 0.1342, 0.2217, 0.4333, 0.0733], [0.0829, 0.3567, 0.1833, 0.0908, 0.0883, 0.07]]
CRITICAL_SECOND = [[4], [2]]
CRITICAL_KEPT = [[1, 4, 6, 7], [1, 2, 6, 7]]
CRITICAL_KVPRESS_FIRST_BUDGET = 2
CRITICAL_KVPRESS_FIRST = [[6, 7], [6, 7]]
CRITICAL_KVPRESS_KEPT = [[3, 4, 6, 7], [1, 2, 6, 7]]
CRITICAL_SNAPKV_KEPT = [[1, 2, 6, 7], [0, 1, 6, 7]]

# Section 7: half is kept.
DEFENSIVE_WORST = [[0.1738, 0.2057, 0.181, 0.1714, 0.1684, 0.1455], [0.3429, 0.3571, 0.186, 0.1823, 0.186, 0.0372]]
DEFENSIVE_PRIOR = [0.1743, 0.2153]
DEFENSIVE_RISKS = [[0.1743, 0.2057, 0.181, 0.1743, 0.1743, 0.1743], [0.3429, 0.3571, 0.2153, 0.2153, 0.2153, 0.2153]]
DEFENSIVE_SHARES = [[0.6667, 0.3333, 0.3333, 0.6667, 0.8, 0.25], [0.3333, 0.6667, 0.6667, 0.3333, 0.2, 0.75]]
DEFENSIVE_WEIGHTED = [  # before the first stage's tokens get the maximum
    [0.1162, 0.0686, 0.0603, 0.1162, 0.1394, 0.0436],
    [0.1143, 0.2381, 0.1435, 0.0718, 0.0431, 0.1615],
]
DEFENSIVE_BIAS = 0.145
DEFENSIVE_THRESHOLD = 0.755
DEFENSIVE_FIRST_COUNTS = [1, 1]
DEFENSIVE_CAP = 1
DEFENSIVE_FIRST = [[0], [0]]
DEFENSIVE_KEPT = [[0, 6, 7], [0, 1, 5, 6, 7]]
DEFENSIVE_MEAN = [  # the mean over the window and the group, for comparison with the worst case
    [0.1158, 0.1583, 0.1342, 0.1108, 0.1083, 0.0733],
    [0.1658, 0.1783, 0.0917, 0.0908, 0.0883, 0.0233],
]

# Section 7b: a second layer with the toy's attention times .25; lower heads first among equal scores.
LAYER_MAXIMA = [0.2381, 0.0595]
LAYER_SECOND_SCORES = [
    [0.0595, 0.0171, 0.0151, 0.029, 0.0349, 0.0109],
    [0.0595, 0.0595, 0.0359, 0.0179, 0.0108, 0.0404],
]
LAYER_BUDGETS = [14, 2]
LAYER_KEPT = [[[0, 1, 2, 3, 4, 6, 7], [0, 1, 2, 3, 5, 6, 7]], [[0, 6], []]]
# Section 7b, the trap: a quarter is kept, the second layer has the attention times .05, and keeps nothing.
LAYER_TRAP_KEPT = [[[4, 6, 7], [1, 2, 5, 6, 7]], [[], []]]

# Section 11: the latest query of four heads over eight tokens, its own included.
TOVA_ROWS = [
    [0.20, 0.05, 0.30, 0.10, 0.05, 0.10, 0.15, 0.05],
    [0.10, 0.20, 0.05, 0.05, 0.20, 0.20, 0.15, 0.05],
    [0.60, 0.05, 0.05, 0.02, 0.03, 0.05, 0.10, 0.10],
    [0.25, 0.05, 0.05, 0.35, 0.05, 0.05, 0.15, 0.05],
]
TOVA_SCORES = [0.2875, 0.0875, 0.1125, 0.13, 0.0825, 0.1, 0.1375, 0.0625]
TOVA_KEPT_4 = [0, 2, 3, 6]
TOVA_KEPT_7 = [0, 1, 2, 3, 4, 5, 6]

# Section 12, the authors: tokens before the window.
# Capacity 544, window 32, 8192 tokens, 32 layers: first, last, sum, mean.
PYRAMID_LARGE = (999, 38, 16592, 518.5)
PYRAMID_SMALL = [39, 30, 21, 12, 3]  # capacity 24, window 4, 200 tokens, 5 layers
# Section 12, kvpress, ratio .9 of 200 tokens in floats, 5 layers: window 4 and beta 4; window 64.
PYRAMID_KVPRESS = [35, 27, 20, 12, 5]
PYRAMID_KVPRESS_UNIFORM = [20, 20, 20, 20, 20]

# Section 13: logits of the true tokens, the last out of reach; one frozen, of the others four kept, two of them recent.
COUNTER_CAUSAL_LOGITS = [4.0, 1.0, 7.0, 2.0, 9.0, 3.0, float("-inf")]
COUNTER_CAUSAL_KEPT = [0, 1, 3, 5, 6]
