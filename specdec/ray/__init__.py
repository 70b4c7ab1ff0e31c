"""Many machines for one job: a stage for Ray Data, and ``specdec run --ray``.

::

    import ray
    from specdec import SamplingParams
    from specdec.ray import SpecDecodeStage

    prompts = ray.data.read_json("prompts.jsonl")  # columns prompt, index, ...
    results = prompts.map_batches(
        SpecDecodeStage,
        fn_constructor_kwargs={
            "target": "MODEL",
            "params": SamplingParams(max_tokens=256, temperature=0.7, seed=1),
        },
        batch_size=128,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=8),
        num_gpus=1,
    )
    results.write_json("results")

Ray restarts a worker that ends, and gives its blocks to this worker or to another one.
A row is a function of its prompt, its parameters and its seed. So it does not matter
which worker decodes it, how often it begins, or which rows decode with it.
"""

from ..utils.extras import naming_backend
from ..utils.process import prepare_process

prepare_process()

with naming_backend():
    from .stage import SpecDecodeStage

__all__ = ["SpecDecodeStage"]
