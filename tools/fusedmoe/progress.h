// One line on stderr that says how far a long verb is: only when stderr is a terminal and only
// after two seconds, so that neither logs nor quick runs ever see it.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace fusedmoe::tool {

class Progress {
 public:
  Progress(std::string label, std::int64_t total);
  ~Progress();  // erases the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(std::int64_t n = 1);

  // Erases the line, for the verb to print something; the next step() draws it again.
  void erase();

 private:
  std::string label_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  bool terminal_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point start_;
  std::chrono::steady_clock::time_point last_draw_;
};

}  // namespace fusedmoe::tool
