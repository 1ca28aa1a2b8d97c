// Files as Python reads them: mapped whole, or in pieces past the page cache.
#pragma once

#include <pybind11/pybind11.h>

// Registers both with the module that bindings.cpp opens.
void bind_io(pybind11::module_& m);
