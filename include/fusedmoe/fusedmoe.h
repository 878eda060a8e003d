// All of the C++ API.
#pragma once

#include "fusedmoe/config.h"      // IWYU pragma: export
#include "fusedmoe/error.h"       // IWYU pragma: export
#include "fusedmoe/execution.h"   // IWYU pragma: export
#include "fusedmoe/expert_map.h"  // IWYU pragma: export
#include "fusedmoe/fused_moe.h"   // IWYU pragma: export
#include "fusedmoe/routing.h"     // IWYU pragma: export
#include "fusedmoe/tensor.h"      // IWYU pragma: export
#include "fusedmoe/version.h"     // IWYU pragma: export
#include "fusedmoe/weights.h"     // IWYU pragma: export
#include "fusedmoe/workspace.h"   // IWYU pragma: export
