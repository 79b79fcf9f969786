"""Rules that mirror DeepSpeed, of the version `registry.DEEPSPEED`.

`engine` is ZeRO-0 and what all stages share, `zero12` ZeRO-1 and ZeRO-2. `zero3` is ZeRO-3: `zero3_passes` runs the
modules, for which `zero3_coordinator` gathers parameters, by `zero3_calls`. `pipeline` is pipeline parallelism, and
`pipeline_calls` has its calls.
"""
