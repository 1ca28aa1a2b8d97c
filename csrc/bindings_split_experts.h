// Routed experts that are computed in whatever order their weights come.
#pragma once

#include <pybind11/pybind11.h>

// Registers it with the module that bindings.cpp opens.
void bind_split_experts(pybind11::module_& m);
