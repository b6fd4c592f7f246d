"""The choice of an indexer: of each query the keys of the highest scores among those at its position and before.

Source: DeepSeek-AI 2025, "DeepSeek-V3.2-Exp", section 2.1. The score of key s for query t is the sum over heads j of
w[t, j] * relu(q[t, j] . k[s]); scales that are the same for all keys change no choice.
"""

import torch
from torch import Tensor


def chosen_keys(queries: Tensor, weights: Tensor, keys: Tensor, count: int) -> Tensor:
    """Return which keys each query attends to, bool [T, n]; of equal scores the earlier key comes first.

    queries  [T, heads, dim] fp64, of the last T of n tokens; weights [T, heads], keys [n, dim]
    """
    num_rows, num_keys = queries.shape[0], keys.shape[0]
    scores = torch.zeros(num_rows, num_keys, dtype=torch.float64, device=queries.device)
    for head in range(queries.shape[1]):
        scores += weights[:, head, None].double() * (queries[:, head].double() @ keys.double().T).relu()
    found = torch.zeros(num_rows, num_keys, dtype=torch.bool, device=queries.device)
    for row in range(num_rows):
        seen = scores[row, : num_keys - num_rows + row + 1]
        best = seen.argsort(descending=True, stable=True)[:count]
        found[row, best] = True
    return found
