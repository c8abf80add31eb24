#include <algorithm>
#include <condition_variable>
#include <functional>
#include <future>
#include <iostream>
#include <memory>
#include <mutex>
#include <queue>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

class ThreadPool {
public:
    explicit ThreadPool(unsigned workers = std::thread::hardware_concurrency()) {
        if (workers == 0) workers = 1;
        for (unsigned i = 0; i < workers; ++i) {
            threads_.emplace_back([this] { run(); });
        }
    }

    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    ~ThreadPool() {
        {
            std::lock_guard lock(mutex_);
            closing_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    template <typename F, typename... Args>
    auto submit(F&& f, Args&&... args) {
        using Result = std::invoke_result_t<F, Args...>;
        auto task = std::make_shared<std::packaged_task<Result()>>(
            [f = std::forward<F>(f), ... args = std::forward<Args>(args)]() mutable {
                return f(std::move(args)...);
            });
        auto future = task->get_future();
        {
            std::lock_guard lock(mutex_);
            if (closing_) throw std::runtime_error("the pool is closing");
            tasks_.emplace([task] { (*task)(); });
        }
        wake_.notify_one();
        return future;
    }

private:
    void run() {
        for (;;) {
            std::function<void()> task;
            {
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
                if (tasks_.empty()) return;  // closing, and nothing is left to do
                task = std::move(tasks_.front());
                tasks_.pop();
            }
            task();
        }
    }

    std::vector<std::thread> threads_;
    std::queue<std::function<void()>> tasks_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool closing_ = false;
};

static long count_primes(long from, long to) {
    long found = 0;
    for (long n = std::max(2L, from); n < to; ++n) {
        bool prime = true;
        for (long d = 2; d * d <= n; ++d) {
            if (n % d == 0) {
                prime = false;
                break;
            }
        }
        found += prime;
    }
    return found;
}

int main() {
    ThreadPool pool(4);
    std::vector<std::future<long>> parts;
    constexpr long limit = 200'000, step = 10'000;
    for (long from = 0; from < limit; from += step) {
        parts.push_back(pool.submit(count_primes, from, from + step));
    }
    long total = 0;
    for (auto& part : parts) total += part.get();
    std::cout << total << " primes below " << limit << '\n';
}
