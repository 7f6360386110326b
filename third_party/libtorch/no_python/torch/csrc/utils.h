// Empty on purpose: c10d's FakeProcessGroup.hpp includes this header of the Python bindings and uses nothing of it.
