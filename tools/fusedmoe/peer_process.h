// One peer of bench --compare as a process that answers JSON lines. What is said is in
// bench/peers/README.md and in bench_peers.cpp; here are start, end, time limits and what goes
// wrong.
#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace fusedmoe::tool {

// The process died, fell silent, or answered something else: it is of no use any more.
class PeerFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class PeerProcess {
 public:
  // command: the program, searched in PATH, and its arguments. Throws PeerFailed.
  explicit PeerProcess(std::vector<std::string> command);
  // Ends the process.
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  // The next line, an object. Throws PeerFailed, with the last line on stderr when it died.
  nlohmann::json receive(double seconds);
  // Sends the request and returns the answer.
  nlohmann::json ask(const nlohmann::json& request, double seconds);

  pid_t pid() const { return pid_; }

 private:
  std::string line(double seconds);
  [[noreturn]] void fail_ended();

  pid_t pid_ = -1;
  int socket_ = -1;
  int errors_ = -1;  // what it wrote to stderr
  std::string received_;
};

// Waits until all threads of the process sleep but for this one, so that they take nothing from
// what is timed next: threads of a pool spin for a while after work. False when they still run
// after a second.
bool wait_until_asleep(pid_t process);

}  // namespace fusedmoe::tool
