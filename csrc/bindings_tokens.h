// Registers the token ops with the module that bindings.cpp opens.
#pragma once

#include <pybind11/pybind11.h>

void bind_token_ops(pybind11::module_& m);
