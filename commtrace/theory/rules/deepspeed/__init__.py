"""Rules that mirror DeepSpeed, of the version `registry.DEEPSPEED`.

`engine` has ZeRO-0, what all stages share, and the settings that have no rules (`check`); `zero12` has ZeRO-1 and
ZeRO-2. `zero3` has ZeRO-3: `zero3_passes` runs the hooks of modules, `zero3_coordinator` simulates which parameters are
gathered, and `zero3_calls` has the calls.
`pipeline` has pipeline parallelism, and `pipeline_calls` has its calls. `experts` has what mixtures of experts add.
"""
