// FUSEDMOE_EXPORT marks what the shared library exports; everything else is hidden.
#pragma once

#if defined(__GNUC__)
#define FUSEDMOE_EXPORT __attribute__((visibility("default")))
#else
#define FUSEDMOE_EXPORT
#endif
