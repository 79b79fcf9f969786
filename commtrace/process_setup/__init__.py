"""How a process is set up: what is not in the program, and may still change its communication or its speed.

Everything is read from /proc, /sys and files that are mapped into the process: no library is called, loaded or
initialized, and a value that cannot be read is missing.

system_files         small files of the kernel as text
variables            environment variables of the communication libraries, without secrets
mapped_libraries     communication libraries that are loaded, and their versions
elf_files            version strings, symbols and build identifiers of shared libraries
network_interfaces   network interfaces, and those on which the process listens
processor_limits     cores, NUMA nodes, and the limits of control groups
control_groups       the control groups of a process
devices              GPUs, their drivers, and RDMA devices
setup_reader         the row of the table `setup`, read again while libraries are loaded
"""
