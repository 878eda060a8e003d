// Counts what the process allocates: bench_allocations.cpp replaces every form of the global
// operator new and delete. Outside a counter that is armed they cost one relaxed load more than
// the runtime's own. Memory that is taken from malloc or mmap directly is not seen.
#pragma once

#include <cstdint>

namespace fusedmoe::tool {

// One at a time in a process; counts the allocations of all threads.
class AllocationCounter {
 public:
  AllocationCounter();
  ~AllocationCounter();
  AllocationCounter(const AllocationCounter&) = delete;
  AllocationCounter& operator=(const AllocationCounter&) = delete;

  // Counts while it lives.
  class Armed {
   public:
    Armed();
    ~Armed();
    Armed(const Armed&) = delete;
    Armed& operator=(const Armed&) = delete;
  };
  Armed arm() { return {}; }

  // Calls of operator new while armed.
  std::int64_t allocations() const;
  // Most bytes alive at once of what was allocated while armed, as asked for: without padding.
  std::int64_t peak_bytes() const;
};

}  // namespace fusedmoe::tool
