"""How long a step takes, by a roofline model of one forward.

Takes: a DeviceConfig, a model's dimensions, bytes per cached token, what the step does. Gives: seconds.
Does not know about: requests, blocks, clocks.

    seconds = overhead + longer(weight bytes / bandwidth, operations / flops)
                       + longer(key bytes / kv_bandwidth, operations / attention_flops), once for decodes, once for prefills
    longer(a, b) = max(a, b) + (1 - overlap) min(a, b)

A step reads the weights once, whatever the batch. Each decoding sequence reads its own keys and values, and blocks that several
share are read by each of them (no cascade attention). Dequantizing takes no time of its own: it is assumed to hide behind the
reading. Sliding windows are not modelled. Source: the roofline model (Williams et al., 2009).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from qkv.config import DeviceConfig
from qkv.errors import ConfigError
from qkv.models import Dimensions


@dataclass(frozen=True)
class StepCost:
    """Gives the seconds of a step on one device with one model. weight_bytes: read in every forward. body: parameters that every
    token is multiplied with. head: those that every row of logits is multiplied with. pair_operations: for one (query, key)
    pair, over all heads and layers."""

    device: DeviceConfig
    weight_bytes: int
    body: int
    head: int
    pair_operations: int
    kv_bytes_per_token: float

    @classmethod
    def of(cls, device: DeviceConfig, dims: Dimensions, itemsize: int, kv_bytes_per_token: float) -> "StepCost":
        """itemsize: bytes of one weight. Raises ConfigError where the model's number of parameters is not known."""
        if dims.parameters is None:
            raise ConfigError("a simulation needs the model's size: add model.parameters=..., e.g. 7e9 as 7000000000")
        body = dims.parameters - dims.head_parameters - dims.embedding_parameters
        read = (body + dims.head_parameters) * itemsize
        pairs = 4 * dims.query_heads * dims.head_dim * dims.layers
        return cls(device, read, body, dims.head_parameters, pairs, kv_bytes_per_token)

    def seconds(self, decodes: int, decode_keys: int, chunks: Iterable[tuple[int, int]], rows: int) -> float:
        """Seconds of one step. decodes: sequences that get one token; decode_keys: keys that they read together. chunks: (start,
        end) of each range of prefilled tokens. rows: how many rows of logits are computed."""
        device, tokens, pairs, chunk_keys = self.device, decodes, 0, 0
        for start, end in chunks:
            n = end - start
            tokens += n
            pairs += n * start + n * (n + 1) // 2
            chunk_keys += end
        linear = self._longer(self.weight_bytes / device.bandwidth, 2 * (self.body * tokens + self.head * rows) / device.flops)
        return device.overhead_s + linear + self._attention(decode_keys, decode_keys) + self._attention(chunk_keys, pairs)

    def _attention(self, keys: int, pairs: int) -> float:
        read = keys * self.kv_bytes_per_token / self.device.kv_bandwidth
        return self._longer(read, pairs * self.pair_operations / self.device.attention_flops)

    def _longer(self, read: float, compute: float) -> float:
        return max(read, compute) + (1 - self.device.overlap) * min(read, compute)

    def copy_seconds(self, num_bytes: int) -> float:
        """Seconds to copy so many bytes between the pool and host memory."""
        return num_bytes / self.device.host_link
