// The native recorder of torch.distributed as one translation unit. Reading torch's headers takes most of a build:
// compiled one by one, these files took three times as much.
#include "device.cpp"
#include "device_events.cpp"
#include "module.cpp"
#include "recording_kernels.cpp"
#include "waits.cpp"
