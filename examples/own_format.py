"""Add a format of weights: a copy of a bundled model, stored with its bytes swapped."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import lowtide
from lowtide.extend import MatrixFormat, register_format


class Swapped(MatrixFormat):
    """bfloat16 as a big-endian machine would write it."""

    name, unpacked = "swapped", "BF16"
    dtypes, block_bytes = ("U16",), (2,)  # each weight is a block of two bytes

    def unpack(self, *stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return stored[0].reshape(-1, 2)[:, ::-1].reshape(-1)


register_format(Swapped())
with tempfile.TemporaryDirectory() as folder:
    copy = Path(folder) / "model"
    shutil.copytree(Path(lowtide.__file__).parent / "demo" / "autoregressive", copy)
    for path in copy.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8:start]), np.frombuffer(content, np.uint8)[start:].copy()
        for name, tensor in header.items():
            if ".experts." in name:
                low, high = tensor["data_offsets"]
                tensor["dtype"], data[low:high] = "U16", Swapped().unpack(data[low:high])
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data.tobytes())
    with lowtide.LLM(copy, context=256) as llm:
        print(llm.generate("Sort 93 21 57 40 12")[0].text)
