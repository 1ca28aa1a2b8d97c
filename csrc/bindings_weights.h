// Registers the ops on packed weights with the module that bindings.cpp opens.
#pragma once

#include <pybind11/pybind11.h>

void bind_weight_ops(pybind11::module_& m);
