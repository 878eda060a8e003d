#include "cpu_use.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

namespace fusedmoe::tool {
namespace {

double seconds_of(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

double ticks_per_second() { return static_cast<double>(std::max(sysconf(_SC_CLK_TCK), 1L)); }

// User and system time of another process; 0 when it is gone.
double seconds_of_process(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  std::getline(file, text);
  const auto name_end = text.rfind(')');  // the name may hold spaces
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skipped;
  for (int field = 3; field < 14; ++field) fields >> skipped;
  double user = 0;
  double system = 0;
  return fields >> user >> system ? (user + system) / ticks_per_second() : 0;
}

}  // namespace

CpuUse::CpuUse(std::vector<pid_t> children) : children_(std::move(children)), start_(read()) {}

CpuUse::Reading CpuUse::read() const {
  Reading reading;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0) return reading;
  std::ifstream file("/proc/stat");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("cpu", 0) != 0 || line.size() < 4 || line[3] == ' ') continue;
    std::istringstream fields(line.substr(3));
    int cpu = 0;
    // The last two, guests, are part of user and nice already.
    double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
    fields >> cpu >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal;
    if (cpu >= CPU_SETSIZE || CPU_ISSET(cpu, &mask) == 0) continue;
    const double busy = user + nice + system + irq + softirq + steal;
    reading.busy += busy / ticks_per_second();
    reading.total += (busy + idle + iowait) / ticks_per_second();
  }
  rusage own{};
  getrusage(RUSAGE_SELF, &own);
  reading.ours = seconds_of(own.ru_utime) + seconds_of(own.ru_stime);
  for (const pid_t child : children_) reading.ours += seconds_of_process(child);
  return reading;
}

double CpuUse::share_of_others() const {
  const Reading now = read();
  const double total = now.total - start_.total;
  if (total <= 0) return 0;
  const double others = (now.busy - start_.busy) - (now.ours - start_.ours);
  return std::clamp(others / total, 0.0, 1.0);
}

}  // namespace fusedmoe::tool
