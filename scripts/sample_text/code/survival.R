# Compare two groups of a small trial: curves of survival and a log-rank test.
kaplan_meier <- function(time, event) {
  times <- sort(unique(time[event == 1]))
  at_risk <- sapply(times, function(t) sum(time >= t))
  deaths <- sapply(times, function(t) sum(time == t & event == 1))
  data.frame(
    time = times,
    at_risk = at_risk,
    deaths = deaths,
    survival = cumprod(1 - deaths / at_risk)
  )
}

log_rank <- function(time, event, group) {
  stopifnot(length(unique(group)) == 2)
  first <- group == unique(group)[1]
  times <- sort(unique(time[event == 1]))
  rows <- lapply(times, function(t) {
    n <- sum(time >= t)
    n1 <- sum(time >= t & first)
    d <- sum(time == t & event == 1)
    d1 <- sum(time == t & event == 1 & first)
    expected <- d * n1 / n
    variance <- if (n > 1) d * (n1 / n) * (1 - n1 / n) * (n - d) / (n - 1) else 0
    c(observed = d1, expected = expected, variance = variance)
  })
  sums <- colSums(do.call(rbind, rows))
  statistic <- (sums["observed"] - sums["expected"])^2 / sums["variance"]
  list(statistic = unname(statistic), p = unname(pchisq(statistic, df = 1, lower.tail = FALSE)))
}

set.seed(11)
n <- 60
trial <- data.frame(group = rep(c("control", "treated"), each = n))
rate <- ifelse(trial$group == "treated", 0.05, 0.09)
lifetime <- rexp(2 * n, rate)
censored <- runif(2 * n, 5, 30)
trial$time <- round(pmin(lifetime, censored), 1)
trial$event <- as.integer(lifetime <= censored)

for (name in unique(trial$group)) {
  part <- subset(trial, group == name)
  curve <- kaplan_meier(part$time, part$event)
  median <- curve$time[which(curve$survival <= 0.5)[1]]
  cat(sprintf("%-8s %2d events, median %s\n", name, sum(part$event), format(median)))
}
result <- with(trial, log_rank(time, event, group))
cat(sprintf("chi-squared %.2f, p = %.3f\n", result$statistic, result$p))
