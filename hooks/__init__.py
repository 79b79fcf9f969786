"""Hooks: how calls of a library become records. One package per library.

A hook is a module with a reversible pair of functions. `commtrace.startup` imports the module and calls `install` as
soon as the program has imported the library, and `uninstall` when tracing stops:

    def install() -> None: ...
    def uninstall() -> None: ...

`install` replaces functions and methods of the library, registers what is needed beside them, and

- is idempotent, and complete or does not happen (`Patches.installer` of `commtrace.patching`): on an error it undoes
  what it has done and raises, and commtrace says once that the library is not traced;
- may import the library, which is in `sys.modules`, and what the library has imported; nothing else that is large;
- must not communicate, start threads, or open files. The recorder begins with the first call
  (`recorder_setup.begin`), when the process knows its rank.

`uninstall` (`Patches.undo`) restores what `install` replaced, unless somebody else has replaced it since, and is
idempotent, too. Exceptions are kernels of torch's dispatcher: another thread may be inside one, so they stay and only
pass calls on.

While the hook is installed, a replaced function passes on every argument, result and exception of the original
unchanged, and holds no lock meanwhile. An error in the hook's own code is counted (`recorder_setup.fault`) and never
raised into the program. Objects of the program are kept by weak reference only. Nothing imports pandas.

To add a hook for another library, for example JAX:

1. Write `hooks/jax/hook.py` with `install` and `uninstall`. List its package under `packages` in setup.cfg.
2. Name it in `commtrace.hook_table.HOOKS`: the module of the library whose import is followed, and the module of the
   hook: `"jax": "commtrace.hooks.jax.hook"`. One library may have several entries, for parts that are imported later.
3. In `install`, put the library's blind spots into `recorder_setup.blind_spots` and, if it knows the process's rank,
   a function into `recorder_setup.identities`, with the library's place in `recorder_setup._IDENTITY_SOURCES`.
4. Make a tracer that turns arguments into records: `recorder_setup.Tracers` starts it with the first call, `Groups`
   (`groups.py`) numbers its process groups, `CallContext` (`call_context.py`) gives call site, phase and step, and
   `Recorder.begin`, `returned` and `ended` write the record.
"""
