"""What is intercepted: one module per library, each a reversible pair `install()` and `uninstall()`."""
