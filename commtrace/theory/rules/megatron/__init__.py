"""Rules that mirror Megatron's code in GPT-NeoX (version `registry.GPT_NEOX`), and where `examples.gpt_neox` differs.

`tensor_parallel` and `sequence_parallel` have the calls of layers, `gpt_neox` those of the program, `sequential_model`
the modules of a model without a pipeline.

The example and GPT-NeoX make the same calls except in three rules (`example_gradients`, `clipping` and
`parallel_residual_order`). Rules of the example alone are in `examples.gpt_neox.theory`; these three stay,
because they are alternatives within rules of both programs. Without them, the installed `commtrace check` would have no
verdict on the example, and a log must not name code to import.
"""
