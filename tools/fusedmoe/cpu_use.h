// Who used the CPUs that this process may run on: what others took of them while a row was timed.
#pragma once

#include <sys/types.h>

#include <vector>

namespace fusedmoe::tool {

// Between its making and share_of_others(). The kernel counts in ticks of 10 ms, so spans below a
// second say little.
class CpuUse {
 public:
  // children: processes whose time is ours as well.
  explicit CpuUse(std::vector<pid_t> children = {});

  // Of the CPU time that passed on the CPUs of the affinity mask, the share that neither this
  // process nor its children used nor left idle; what a hypervisor gave to other machines counts.
  // 0 where the kernel does not say.
  double share_of_others() const;

 private:
  struct Reading {
    double busy = 0;   // seconds on all CPUs of the mask
    double ours = 0;   // seconds of this process and its children
    double total = 0;  // seconds, idle ones included
  };
  Reading read() const;

  std::vector<pid_t> children_;
  Reading start_;
};

}  // namespace fusedmoe::tool
