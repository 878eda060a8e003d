#include "peer_process.h"

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "bench_threads.h"

namespace fusedmoe::tool {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kSecondsToEnd = 2;
constexpr double kSecondsToSleep = 0.5;
constexpr std::size_t kMostShown = 160;  // of a line that is no answer

std::string shown(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return text.size() > kMostShown ? text.substr(0, kMostShown) + "..." : text;
}

// The last line with anything in it: of a Python program, its exception.
std::string last_line(int fd) {
  char text[4096];
  const off_t end = lseek(fd, 0, SEEK_END);
  const off_t begin = std::max<off_t>(end - static_cast<off_t>(sizeof(text)), 0);
  const ssize_t got = pread(fd, text, sizeof(text), begin);
  std::string all(text, static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  while (!all.empty() && std::strchr("\r\n ", all.back()) != nullptr) all.pop_back();
  const auto newline = all.rfind('\n');
  return shown(newline == std::string::npos ? all : all.substr(newline + 1));
}

}  // namespace

PeerProcess::PeerProcess(std::vector<std::string> command) {
  // A socket and not a pipe: writing to a process that died is then an error, not a signal.
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw PeerFailed(std::string("no socket: ") + std::strerror(errno));
  }
  socket_ = ends[0];
  errors_ = memfd_create("fusedmoe_peer_errors", MFD_CLOEXEC);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors_, STDERR_FILENO);
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const int error = posix_spawnp(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  if (error != 0) {
    close(socket_);
    close(errors_);
    throw PeerFailed(command[0] + " cannot be started: " + std::strerror(error));
  }
}

PeerProcess::~PeerProcess() {
  close(socket_);  // the end of its stdin is what it waits for
  const auto start = Clock::now();
  while (pid_ > 0 && waitpid(pid_, nullptr, WNOHANG) == 0) {
    if (seconds_since(start) > kSecondsToEnd) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  close(errors_);
}

void PeerProcess::fail_ended() {
  int status = 0;
  const pid_t pid = std::exchange(pid_, -1);
  shutdown(socket_, SHUT_RDWR);  // it may have closed its stdout and live on
  const auto start = Clock::now();
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (seconds_since(start) > kSecondsToEnd) kill(pid, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::string text = WIFSIGNALED(status)
                         ? std::string("ended by signal ") + strsignal(WTERMSIG(status))
                         : "ended with exit code " + std::to_string(WEXITSTATUS(status));
  const std::string words = last_line(errors_);
  throw PeerFailed(words.empty() ? text : text + ": " + words);
}

std::string PeerProcess::line(double seconds) {
  if (pid_ < 0) throw PeerFailed("ended before");
  const auto start = Clock::now();
  for (;;) {
    const auto newline = received_.find('\n');
    if (newline != std::string::npos) {
      std::string text = received_.substr(0, newline);
      received_.erase(0, newline + 1);
      return text;
    }
    const double left = seconds - seconds_since(start);
    pollfd wanted{socket_, POLLIN, 0};
    const int ready = left <= 0 ? 0 : poll(&wanted, 1, static_cast<int>(left * 1000) + 1);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) {
      throw PeerFailed("said nothing for " + std::to_string(static_cast<int>(seconds)) + " s");
    }
    char text[4096];
    const ssize_t got = read(socket_, text, sizeof(text));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) fail_ended();
    received_.append(text, static_cast<std::size_t>(got));
  }
}

nlohmann::json PeerProcess::receive(double seconds) {
  const std::string text = line(seconds);
  nlohmann::json answer = nlohmann::json::parse(text, nullptr, false);
  if (!answer.is_object()) {
    throw PeerFailed("answered '" + shown(text) + "' where a JSON object was expected");
  }
  return answer;
}

nlohmann::json PeerProcess::ask(const nlohmann::json& request, double seconds) {
  const std::string text = request.dump() + "\n";
  for (std::size_t sent = 0; sent < text.size();) {
    const ssize_t done = send(socket_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) break;  // it ended: receive() says how
    sent += static_cast<std::size_t>(done);
  }
  return receive(seconds);
}

bool wait_until_asleep(pid_t process) {
  namespace fs = std::filesystem;
  const std::string self = std::to_string(gettid());
  const auto runs = [&] {
    std::error_code ignored;
    const fs::path tasks = "/proc/" + std::to_string(process) + "/task";
    for (const auto& task : fs::directory_iterator(tasks, ignored)) {
      if (task.path().filename() == self) continue;
      std::ifstream file(task.path() / "stat");
      std::string text;
      std::getline(file, text);
      const auto name_end = text.rfind(')');  // the name may hold spaces
      if (name_end != std::string::npos && text.substr(name_end, 3) == ") R") return true;
    }
    return false;
  };
  const auto start = Clock::now();
  // Twice: a thread may sleep for a moment between two reasons to run.
  for (int asleep = 0; asleep < 2;) {
    if (seconds_since(start) > kSecondsToSleep) return false;
    asleep = runs() ? 0 : asleep + 1;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace fusedmoe::tool
