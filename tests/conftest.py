"""Settings for all tests."""

import torch

# Tiny models on several threads mostly wait for each other.
torch.set_num_threads(1)
