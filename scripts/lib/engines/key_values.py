"""A key/value cache that is allocated once, and shrinks with its batch.

Shapes: B rows, K key/value heads, C capacity and T filled columns, N new columns, D head size.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer in buffers [B, K, C, D]; an update writes in place instead of copying all before it.

    The inherited `keys` and `values` are views of the filled columns.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self.rows, self.capacity, self.length = rows, capacity, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for `key_states` and `value_states` [., K, ., D]. Zeros, as a masked column must not hold NaN."""
        self.key_buffer = self._buffer(key_states)
        self.value_buffer = self._buffer(value_states)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, K, N, D] as columns and return keys and values of all columns, [B, K, T + N, D]."""
        self.length += key_states.shape[-2]
        self.write(slice(0, self.rows), self.length - key_states.shape[-2], key_states, value_states)
        return self._view()

    def write(self, rows: slice, column: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Put [b, K, N, D] into the buffers at `rows`, from `column` on, without changing the length."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        columns = slice(column, column + key_states.shape[-2])
        self.key_buffer[rows, :, columns] = key_states
        self.value_buffer[rows, :, columns] = value_states

    def fill(self, length: int) -> None:
        """Declare the first `length` columns filled."""
        self.length = length
        self._view()

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only `rows` (ascending indexes), moved to the front."""
        self.rows = len(rows)
        for buffer in (self.key_buffer, self.value_buffer):
            buffer[: self.rows, :, : self.length] = buffer[rows, :, : self.length]
        self._view()

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(self.rows, states.shape[1], self.capacity, states.shape[3])

    def _view(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = self.key_buffer[: self.rows, :, : self.length]
        self.values = self.value_buffer[: self.rows, :, : self.length]
        return self.keys, self.values
