"""Sales taxed at the rate that was in force when they were made, also when the sale, or the rate, is told later.

headwater run examples/tax_rates/app.py
"""

from pyspark.sql import functions as F

import headwater as hw

app = hw.App("tax_rates", log="./tax_rates")

sales = app.topic(
    "sales",
    schema="id BIGINT, country STRING, amount DECIMAL(12,2), at TIMESTAMP",
    key="country",
    time="at",
    lateness="1 hour",
)
rates = app.table("rates", schema="country STRING, percent DECIMAL(5,2), since TIMESTAMP", key="country", time="since")


@app.stream(sales, rates, key="country", time="at")
def taxed(sales, rates):
    """Each sale with its tax; one from a country without a rate has none."""
    found = hw.lookup(sales, rates, "country")
    return found.withColumn("tax", F.round(F.col("amount") * F.col("percent") / 100, 2).cast("decimal(12,2)"))


if __name__ == "__main__":
    app.run()
