// Usage: moe_comm_tests [part of a test's name] [repeats]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "check.h"

namespace moe_comm::test {

namespace {
std::mutex output;
int failed = 0;
int repeat = 1;
}  // namespace

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

void fail(const char* file, int line, const std::string& what) {
  std::lock_guard<std::mutex> lock(output);
  if (++failed <= 50) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

int failures() {
  std::lock_guard<std::mutex> lock(output);
  return failed;
}

int repeats() { return repeat; }

uint64_t Random::next() {  // xorshift64*
  state_ ^= state_ >> 12;
  state_ ^= state_ << 25;
  state_ ^= state_ >> 27;
  return state_ * 0x2545f4914f6cdd1dull;
}

void on_ranks(int world, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&body, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        fail("on_ranks", rank, std::string("an exception left rank ") + std::to_string(rank) + ": " + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace moe_comm::test

int main(int argc, char** argv) {
  using namespace moe_comm::test;
  const char* part = argc > 1 ? argv[1] : "";
  if (argc > 2) repeat = std::atoi(argv[2]);
  int ran = 0;
  for (const Test& test : tests()) {
    if (std::strstr(test.name, part) == nullptr) continue;
    const int before = failures();
    try {
      test.body();
    } catch (const std::exception& error) {
      fail(test.name, 0, std::string("an exception left the test: ") + error.what());
    }
    ++ran;
    std::printf("%-4s %s\n", failures() == before ? "ok" : "FAIL", test.name);
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failed checks\n", ran, failures());
  return failures() || ran == 0 ? 1 : 0;
}
