"""Rules that mirror DeepSpeed, of the version `registry.DEEPSPEED`.

`engine` is ZeRO-0 and what all stages share, `zero12` ZeRO-1 and ZeRO-2, `zero3` and `zero3_coordinator` ZeRO-3;
`pipeline` is pipeline parallelism.
"""
