"""Predict what a training job communicates from its description alone, without recorded events or a framework.

    from commtrace.theory import predict
    prediction = predict(job_row)       # ExpectedCalls of one rank: at start-up and in each training step

`closed_forms` has the volume formulas of the literature. `rules` has exact predictions, one sub-package per library;
each rule is one small function that mirrors one function of the library. `configs` converts configuration files
(GPT-NeoX, DeepSpeed, Hugging Face) to job rows, and `forecast` their predictions to tables and text.
`job` is a captured job, `expected_calls` what rules expect of it, and `purpose_forms` the closed forms of a step by
purpose; `activation_forms` has those of tensor-parallel plans, and `expert_forms` those of experts. `model_shapes` has
the parts of models, and GPT-NeoX's model; Hugging Face's are in `configs.hugging_face`.
"""

from .expected_calls import ExpectedCall, Prediction
from .job import NotPredictedError
from .rules.schemes import predict

__all__ = ["ExpectedCall", "NotPredictedError", "Prediction", "predict"]
