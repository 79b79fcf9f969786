"""Hooks, which record the calls of a library. There is one package per library.

Shared modules:

    recorder_setup          starts the recorder at the first call; `guard` counts errors (`recording.counters`)
    call_context            call site, phase (forward, backward ...) and step of each call
    call_site               the line that made a call, and properties of the frames above it; bounds the memory for
                            code that is made at run time
    groups, group_creation  rows of process groups, sequence numbers; times to create groups
    purposes, marked_sources    why a library calls: marks of threads; a hook made of tables of functions

A hook is a module with a reversible pair of functions. `commtrace.startup` imports the module and
calls `install` as soon as the program has imported the library, and `uninstall` when tracing stops:

    def install() -> None: ...
    def uninstall() -> None: ...

`install` replaces functions and methods of the library and registers what else the hook needs. It

- is idempotent and atomic (`Patches.installer` of `commtrace.patching`): on an error, it undoes
  what it has done and raises, and commtrace warns once that the library is not traced;
- may import the library, which is in `sys.modules`, and what the library has imported, but no other
  large module;
- must not communicate, start threads, or open files. The recorder starts at the first call
  (`recorder_setup.ensure_recorder`), when the rank is known.

`uninstall` (`Patches.undo`) restores what `install` replaced, unless other code has replaced it
since. It is idempotent, too. Kernels of torch's dispatcher stay, because another thread may be
inside one; they then only pass calls on.

A replacement passes on all arguments, results and exceptions unchanged, and holds no lock during
the original call. An error in the hook's own code is counted (`recorder_setup.guard`) and never
raised into the program. Hooks keep objects of the program by weak reference only, and do not import
pandas.

To add a hook for another library, for example JAX:

1. Write `hooks/jax/hook.py` with `install` and `uninstall`. List its package under `packages` in setup.cfg.
2. Add a line to `commtrace.hook_table.HOOKS`: the module of the library, whose import installs the
   hook, and the module of the hook: `"jax": "commtrace.hooks.jax.hook"`. A library may have several
   entries, for modules that are imported later.
3. In `install`, add the library's blind spots to `recorder_setup.blind_spots`. If the library
   provides the process's rank, add a function to `recorder_setup.identities` and the library to
   `recorder_setup._IDENTITY_SOURCES`.
4. Write a tracer that makes records from arguments: `recorder_setup.Tracers` creates it at the
   first call, `Groups` (`groups.py`) numbers its process groups, `CallContext` (`call_context.py`)
   determines call site, phase and step, and `Recorder.begin`, `returned` and `ended` write the
   record.
"""
